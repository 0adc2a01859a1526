"""`seedrl plan`: the memory that a run would take, by leaf, as a formula with its numbers; nothing is started but a probe of the environment."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from seedrl.config import Config, load_config
from seedrl.run import num_slots_of, size_text
from seedrl.spec import EnvSpec
from seedrl.supervise import MAX_GROUPS, probe


def rows_of(config: Config, spec: EnvSpec, num_slots: int) -> tuple[list[tuple[str, str, int]], str]:  # fmt: skip
    """(what, its formula, bytes) of all that is allocated at the start, and the rule of the store in words.

    Raises: ConfigError, as a run's start does.
    """
    from seedrl.policy.agent import make_agent, stored_extras
    from seedrl.store.plan import StorePlan
    from seedrl.store.state import leaves
    from seedrl.store.tiers import rows_behind
    from seedrl.store.weights import WeightsLayout
    from seedrl.transport.slab import SlabLayout

    policy, heads = make_agent(config, spec, num_slots)
    state = leaves(policy.initial_state(1))
    extras = stored_extras(config, policy)
    plan = StorePlan.of(config, spec, heads.stored_specs(), state, num_slots, extras)
    rule, blocks = plan.blocks.rule, plan.blocks.num_blocks
    slab = SlabLayout.of(spec, num_slots, min(num_slots, MAX_GROUPS))
    found = [(f"slab, {num_slots} slots", "", slab.nbytes)]
    per_slot = sum(leaf.nbytes for leaf in state)
    found.append(("recurrent state", f"{num_slots} slots x {per_slot} B", num_slots * per_slot))
    stack = config.env.frame_stack
    if stack > 1:
        frame = sum(leaf.row_bytes for leaf in plan.blocks.rows if leaf.name.startswith("obs/"))
        found.append((f"stacks of {stack} frames", f"2 x {num_slots} slots x {stack} x {frame} B", 2 * num_slots * stack * frame))  # fmt: skip
    found.append(("weights, two buffers", "", WeightsLayout.of(policy).nbytes))
    for leaf in plan.blocks.rows:
        count = blocks * rule.block_length
        found.append((f"replay {leaf.name}", f"{blocks} blocks x {rule.block_length} rows x {leaf.row_bytes} B", count * leaf.row_bytes))  # fmt: skip
    for leaf in plan.blocks.states:
        found.append((f"replay {leaf.name}", f"{blocks} blocks x {rule.states_per_block} x {leaf.row_bytes} B", blocks * rule.states_per_block * leaf.row_bytes))  # fmt: skip
    for name, nbytes in zip(("host's memory behind", "file behind"), config.replay.bytes_behind, strict=True):  # fmt: skip
        if nbytes:
            fit = rows_behind(plan.blocks, nbytes, config.replay.compress)
            found.append((f"replay, {name}", f"at most {fit:,} rows", nbytes))
    found.append(("replay announcements", f"8 B x ({plan.control.capacity} unrolls x {plan.control.width} + {blocks})", plan.control.nbytes))  # fmt: skip
    held = f"{num_slots} slots x {rule.blocks_held} blocks are those of the unrolls that are being filled"
    text = (
        f"{config.replay.mode}: unrolls of {rule.unroll_length} steps after {rule.burn_in} rows, one every {rule.stride} rows, "
        f"in blocks of {rule.block_length}; {held}"
        + (f"; the {rule.history} frames before each are kept for it" if rule.history else "")
    )
    return found, text


def plan(name: str, overrides: list[str]) -> int:
    """Prints the table; 0. Raises: ConfigError, SpecError, as a run's start does."""
    config = load_config(name, overrides)
    final_envs = min(config.evaluation.envs_per_worker, config.evaluation.episodes)
    num_slots = num_slots_of(config, final_envs, workers=True)
    found, text = rows_of(config, probe(config), num_slots)
    table = Table(box=None, pad_edge=False)
    for title, side in (("what", "left"), ("formula", "left"), ("bytes", "right"), ("", "right")):
        table.add_column(title, justify=side)  # type: ignore[arg-type]
    for what, formula, nbytes in found:
        table.add_row(what, formula, f"{nbytes:,}", size_text(nbytes))
    total = sum(nbytes for _, _, nbytes in found)
    table.add_row("in all", "", f"{total:,}", size_text(total))
    console = Console(width=140, highlight=False)
    console.print(table)
    console.print(text)
    return 0
