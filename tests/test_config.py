"""The configuration: what is right reads back equal, what is wrong is refused at its line with the nearest right spelling."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from seedrl.config import Config, dump_yaml, help_config, load_config, shipped_configs
from seedrl.config_yaml import parse, value_of
from seedrl.errors import ConfigError


def load(folder: Path, text: str, *overrides: str) -> Config:
    path = folder / "given.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(str(path), list(overrides))


def refusal(folder: Path, text: str, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, *overrides)
    assert caught.value.exit_code == 2
    assert len(str(caught.value).splitlines()) <= 3
    assert caught.value.what and caught.value.where and caught.value.do
    return caught.value


# ----------------------------------------------------------------------------------------------------- unknown keys


@pytest.mark.parametrize(
    ("text", "where", "nearest"),
    [
        ("lerner:\n  batch_size: 3\n", "given.yaml:1 lerner", "learner"),
        ("run:\n  seed: 3\n\nLearner:\n  batch_size: 3\n", "given.yaml:4 Learner", "learner"),
        ("batching:\n  max_wait: 3\n", "given.yaml:2 batching.max_wait", "batching.max_wait_us"),
        (
            "learner:\n  # why\n  lr_schedule: linear\n",
            "given.yaml:3 learner.lr_schedule",
            "learner.schedule",
        ),
        ("algorithm:\n  gama: 0.9\n", "given.yaml:2 algorithm.gama", "algorithm.gamma"),
        ("algorithm:\n  lambda_: 0.9\n", "given.yaml:2 algorithm.lambda_", "algorithm.lambda"),
        (
            "policy:\n  hidden: [8]\n  core-size: 3\n",
            "given.yaml:3 policy.core-size",
            "policy.core_size",
        ),
        ("learning_rate: 1e-3\n", "given.yaml:1 learning_rate", "learner.learning_rate"),
        ("lerning_rate: 1e-3\n", "given.yaml:1 lerning_rate", "learner.learning_rate"),
        ("engine: {device: cpu, thread: 1}\n", "given.yaml:1 engine.thread", "engine.threads"),
    ],
)
def test_an_unknown_key_is_refused_at_its_line_with_the_nearest(
    tmp_path: Path, text: str, where: str, nearest: str
) -> None:
    error = refusal(tmp_path, text)
    assert error.where == where
    assert f"did you mean {nearest}?" in error.do


@pytest.mark.parametrize(
    ("text", "belongs"),
    [
        ("learner:\n  envs_per_worker: 3\n", "workers.envs_per_worker"),
        ("env:\n  num: 3\n", "workers.num"),
        ("run:\n  learning_rate: 3\n", "learner.learning_rate"),
        ("workers:\n  max_slots: 3\n", "batching.max_slots"),
    ],
)
def test_a_right_key_in_the_wrong_section_says_which_section(
    tmp_path: Path, text: str, belongs: str
) -> None:
    error = refusal(tmp_path, text)
    assert belongs in error.do and "given.yaml:2" in error.where
    assert belongs.partition(".")[0] in error.what


def test_a_key_like_none_lists_those_that_there_are(tmp_path: Path) -> None:
    assert "seed, deterministic" in refusal(tmp_path, "run:\n  zzz: 1\n").do
    assert "env, workers" in refusal(tmp_path, "zzzzzz: 1\n").do


@pytest.mark.parametrize(
    "text",
    [
        "run:\n  seed: 1\n  seed: 2\n",
        "run:\n  seed: 1\nrun:\n  keep: 2\n",
        "env:\n  kwargs: {a: 1, a: 2}\n",
    ],
)
def test_a_key_given_twice_is_refused_with_both_lines(tmp_path: Path, text: str) -> None:
    error = refusal(tmp_path, text)
    assert "twice" in error.what and "given.yaml:" in error.where and "given.yaml:" in error.do


@pytest.mark.parametrize(
    ("argument", "nearest"),
    [
        ("learner.lerning_rate=1e-3", "learner.learning_rate"),
        ("lerner.learning_rate=1e-3", "learner.learning_rate"),
        ("lerner.lerning_rate=1e-3", "learner.learning_rate"),
        ("batching.max_wait=5", "batching.max_wait_us"),
        ("learning_rate=1e-3", "learner.learning_rate"),
        ("max_wait=1", "batching.max_wait_us"),
        ("learner={bach_size: 3}", "learner.batch_size"),
    ],
)
def test_a_typo_on_the_command_line_names_the_nearest(
    tmp_path: Path, argument: str, nearest: str
) -> None:
    error = refusal(tmp_path, "", argument)
    assert error.where == f"command line: {argument}"
    assert nearest in error.do


@pytest.mark.parametrize(
    "argument", ["no-equals-sign", "=3", "run=3", "run.seed.x=3", "env.kwargs={a: [1}"]
)
def test_a_malformed_argument_is_refused(tmp_path: Path, argument: str) -> None:
    assert "command line" in refusal(tmp_path, "", argument).where


# ------------------------------------------------------------------------------------------------------ wrong values


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("learner: {learning_rate: fast}", ["'fast'", "a number more than 0"]),
        ("learner: {learning_rate: 0}", ["0", "more than 0"]),
        ("learner: {learning_rate: .nan}", [".nan", "number"]),
        ("learner: {learning_rate: .inf}", [".inf", "number"]),
        ("learner: {learning_rate: true}", ["true", "number"]),
        ("learner: {learning_rate: '1e-3'}", ["'1e-3'", "number"]),
        ("learner: {learning_rate: null}", ["null", "number"]),
        ("workers: {num: 0}", ["0", "from 1 to 1024"]),
        ("workers: {num: 2.5}", ["2.5", "whole number"]),
        ("workers: {num: yes}", ["'yes'", "whole number"]),
        ("workers: {num: [2]}", ["[2]", "whole number"]),
        ("workers: {num: {a: 2}}", ["{a: 2}", "whole number"]),
        ("run: {deterministic: 1}", ["1", "true or false"]),
        ("run: {deterministic: on}", ["'on'", "true or false"]),
        ("env: {id: [CartPole-v1]}", ["[CartPole-v1]", "text"]),
        ("env: {id: ''}", ["''", "not empty"]),
        ("env: {kwargs: 3}", ["3", "mapping"]),
        ("env: {stats: a}", ["'a'", "a list of texts"]),
        ("env: {check: strickt}", ["'strickt'", "did you mean strict?"]),
        ("policy: {core: lstn}", ["'lstn'", "none, lstm, gru", "did you mean lstm?"]),
        ("policy: {hidden: 64}", ["64", "a list of whole numbers"]),
        ("policy: {hidden: [64, 6f]}", ["policy.hidden[1]", "'6f'", "whole number"]),
        ("policy: {hidden: [64, 0]}", ["policy.hidden[1]", "0", "from 1"]),
        ("batching: {max_batch: 0}", ["0", "or null"]),
        ("replay: {mode: lifo}", ["'lifo'", "queue", "recent"]),
        ("algorithm: {name: sac}", ["'sac'", "vtrace"]),
        ("algorithm: {lambda: 2}", ["2", "from 0 to 1"]),
        ("workers: 3", ["workers", "section"]),
        ("workers: [3]", ["workers", "section"]),
    ],
)
def test_a_wrong_value_is_refused_at_its_line_with_what_is_right(
    tmp_path: Path, line: str, words: list[str]
) -> None:
    error = refusal(tmp_path, f"evaluation:\n  episodes: 1\n{line}\n")
    assert error.where.startswith("given.yaml:3 ")
    assert all(word in str(error) for word in words), str(error)


def test_an_item_of_a_long_list_is_refused_at_its_own_line(tmp_path: Path) -> None:
    assert (
        refusal(tmp_path, "policy:\n  hidden:\n    - 64\n    - x\n").where
        == "given.yaml:4 policy.hidden[1]"
    )


DQN = "algorithm:\n  name: dqn\nreplay:\n  mode: uniform\n  capacity: 9999\n"


@pytest.mark.parametrize(
    ("text", "where", "words"),
    [
        (
            "batching:\n  max_batch: 32\n  min_batch: 64\n",
            "given.yaml:3 batching.min_batch",
            ["64", "32"],
        ),
        ("workers:\n  envs_per_worker: 15\n", "given.yaml:2 workers.envs_per_worker", ["15", "16"]),
        ("learner:\n  stride: 20\n", "given.yaml:2 learner.stride", ["20", "unrolls of 16"]),
        ("learner:\n  stride: 8\n", "given.yaml:2 learner.stride", ["vtrace", "twice"]),
        (
            "replay:\n  mode: uniform\n  capacity: 9999\n",
            "given.yaml:2 replay.mode",
            ["vtrace", "uniform", "dqn"],
        ),
        (
            "algorithm:\n  name: dqn\n",
            "given.yaml:2 algorithm.name",
            ["dqn", "queue", "prioritized"],
        ),
        (
            "algorithm:\n  name: dqn\nreplay:\n  mode: uniform\n",
            "given.yaml:4 replay.mode",
            ["replay.capacity"],
        ),
        (
            DQN + "policy:\n  core: gru\n",
            "given.yaml:2 algorithm.name",
            ["no memory", "gru", "r2d2"],
        ),
        (
            DQN + "  max_uses: 2\n  samples_per_insert: 3\n",
            "given.yaml:7 replay.samples_per_insert",
            ["3 draws", "after 2"],
        ),
        (DQN + "  ratio_tolerance: 9\n", "given.yaml:6 replay.ratio_tolerance", ["no ratio"]),
        (
            DQN + "  importance_exponent: 1\n",
            "given.yaml:6 replay.importance_exponent",
            ["uniform", "prioritized"],
        ),
        (
            DQN + "learner:\n  schedule: linear\nrun:\n  max_steps: 9\n",
            "given.yaml:7 learner.schedule",
            ["samples_per_insert"],
        ),
        (
            DQN + "run:\n  deterministic: true\nworkers:\n  num: 1\n",
            "given.yaml:7 run.deterministic",
            ["uniform", "depends on"],
        ),
        ("replay:\n  max_uses: 2\n", "given.yaml:2 replay.max_uses", ["queue", "once"]),
        (
            "algorithm:\n  n_step: 2\n",
            "given.yaml:2 algorithm.n_step",
            ["belongs to r2d2 or dqn", "vtrace"],
        ),
        ("replay:\n  capacity: 100\n", "given.yaml:2 replay.capacity", ["100", "256"]),
        ("run:\n  deterministic: true\n", "given.yaml:2 run.deterministic", ["workers.num", "1"]),
        ("learner:\n  schedule: linear\n", "given.yaml:2 learner.schedule", ["run.max_steps"]),
        ("engine:\n  device: gpu\n", "given.yaml:2 engine.device", ["gpu", "cuda"]),
        ("learner:\n  device: cuda:x\n", "given.yaml:2 learner.device", ["cuda:x"]),
        ("replay:\n  device: cuda\n", "given.yaml:2 replay.device", ["cuda", "cpu"]),
        (
            "batching:\n  buckets: [8, 8]\n",
            "given.yaml:2 batching.buckets",
            ["[8, 8] are no sizes that rise", "each more than"],
        ),
        ("evaluation:\n  every_s: 5\n", "given.yaml:2 evaluation.every_s", ["evaluation.slots 0"]),
        (
            "algorithm:\n  name: ppo\n",
            "given.yaml:2 algorithm.name",
            ["batch_size to 32", "not 16"],
        ),
        (
            "algorithm:\n  name: ppo\n  rho_bar: 2\nlearner:\n  batch_size: 32\n",
            "given.yaml:3 algorithm.rho_bar",
            ["synchronous"],
        ),
        (
            "algorithm:\n  epochs: 3\n",
            "given.yaml:2 algorithm.epochs",
            ["belongs to ppo", "vtrace"],
        ),
        (
            "policy:\n  core: lstm\n  separate_value: true\n",
            "given.yaml:3 policy.separate_value",
            ["lstm"],
        ),
    ],
)
def test_a_contradiction_is_refused_at_the_line_that_made_it(
    tmp_path: Path, text: str, where: str, words: list[str]
) -> None:
    error = refusal(tmp_path, text)
    assert error.where == where
    assert all(word in str(error) for word in words), str(error)


def test_a_contradiction_of_file_and_argument_names_what_was_given(tmp_path: Path) -> None:
    error = refusal(tmp_path, "batching:\n  max_batch: 32\n", "batching.min_batch=64")
    assert error.where == "command line: batching.min_batch=64"
    error = refusal(tmp_path, "batching:\n  min_batch: 64\n", "batching.max_batch=32")
    assert error.where == "command line: batching.max_batch=32"


def test_a_contradiction_is_refused_in_python_too() -> None:
    with pytest.raises(ConfigError, match="min_batch 64"):
        Config.model_validate({"batching": {"min_batch": 64, "max_batch": 32}})
    with pytest.raises(ValidationError):
        Config.model_validate({"learner": {"lerning_rate": 1.0}})
    config = Config()
    with pytest.raises(ValidationError):
        config.learner.learning_rate = -1.0


@pytest.mark.parametrize(
    "data",
    [b"a: [1\n", b"\tx: 1\n", b"- 1\n", b"3\n", b"\xff\xfe\x00", b"run: &a\n  *a : 1\n", b"env: {kwargs: !!python/object:x {}}\n", b"a: 1\n--- \nb: 1\n"],
)  # fmt: skip
def test_what_is_no_configuration_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "given.yaml"
    path.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        load_config(str(path), [])
    assert "given.yaml" in caught.value.where


# ----------------------------------------------------------------------------------------------------- names of files


def test_an_unknown_name_gives_the_nearest_and_those_shipped() -> None:
    with pytest.raises(ConfigError, match="cartpol") as caught:
        load_config("cartpol", [])
    assert "did you mean cartpole?" in caught.value.do and "minatar_breakout" in caught.value.do
    with pytest.raises(ConfigError) as caught:
        load_config("zzzzzz", [])
    assert "cartpole" in caught.value.do


def test_a_missing_file_gives_the_nearest_beside_it(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("run: {seed: 4}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(str(tmp_path / "mien.yaml"), [])
    assert "mine.yaml" in caught.value.do
    with pytest.raises(ConfigError):
        load_config(str(tmp_path / "nowhere" / "mine.yaml"), [])
    assert load_config(str(tmp_path / "mine.yaml"), []).run.seed == 4


def test_an_empty_file_and_an_empty_section_are_the_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, "") == load(tmp_path, "# nothing\nrun:\nenv: ~\n") == Config()


# ----------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1e-3", 1e-3),
        ("3E-4", 3e-4),
        (".5", 0.5),
        ("1", 1.0),
        ("5.", 5.0),
        ("0.000_1", 1e-4),
        ("2.5e-1", 0.25),
    ],
)
def test_a_number_field_takes_every_spelling_of_a_number(
    tmp_path: Path, text: str, number: float
) -> None:
    assert load(tmp_path, f"learner:\n  learning_rate: {text}\n").learner.learning_rate == number
    assert load(tmp_path, "", f"learner.learning_rate={text}").learner.learning_rate == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1e6", 10**6),
        ("1_000_000", 10**6),
        ("1E3", 1000),
        ("1000", 1000),
        ("2.0", 2),
        ("0x10", 16),
        ("+7", 7),
    ],
)
def test_a_whole_number_field_takes_whole_numbers_however_spelt(
    tmp_path: Path, text: str, number: int
) -> None:
    for config in (
        load(tmp_path, f"run:\n  max_steps: {text}\n"),
        load(tmp_path, "", f"run.max_steps={text}"),
    ):
        assert config.run.max_steps == number and type(config.run.max_steps) is int


@pytest.mark.parametrize(
    "text", ["on", "no", "yes", "08", "12:30", "1e3", "1_000", ".5", "true", "0x1f", "2024-01-01"]
)
def test_a_text_field_keeps_its_text(tmp_path: Path, text: str) -> None:
    for config in (load(tmp_path, f"run:\n  dir: {text}\n"), load(tmp_path, "", f"run.dir={text}")):
        assert config.run.dir == text
        assert load(tmp_path, dump_yaml(config)) == config
    assert load(tmp_path, f"env:\n  stats: [{text}]\n").env.stats == [text]


def test_a_number_with_a_leading_zero_is_refused_where_it_may_be_text(tmp_path: Path) -> None:
    assert "given.yaml:2" in refusal(tmp_path, "env:\n  kwargs: {code: 08}\n").where
    assert "given.yaml:2" in refusal(tmp_path, "run:\n  max_steps: 010\n").where


def test_environment_kwargs_follow_yaml_1_2(tmp_path: Path) -> None:
    text = "{a: 1e-3, b: on, c: no, d: 12:30, e: 1_000_000, f: true, g: null, h: [.5, {i: '08'}], j: 1e6}"
    wanted = {"a": 1e-3, "b": "on", "c": "no", "d": "12:30", "e": 10**6, "f": True, "g": None, "h": [0.5, {"i": "08"}], "j": 1e6}  # fmt: skip
    assert load(tmp_path, f"env:\n  kwargs: {text}\n").env.kwargs == wanted
    assert load(tmp_path, "", f"env.kwargs={text}").env.kwargs == wanted


def test_arguments_change_the_file_and_the_last_one_wins(tmp_path: Path) -> None:
    text = "env:\n  kwargs: {a: 1, b: {c: 2}}\nrun: {seed: 3}\n"
    config = load(
        tmp_path,
        text,
        "env.kwargs.b.c=5",
        "run.seed=4",
        "run.seed=5",
        "policy={core: gru}",
        "run.max_seconds=",
    )
    assert config.env.kwargs == {"a": 1, "b": {"c": 5}}
    assert (config.run.seed, config.policy.core, config.run.max_seconds) == (5, "gru", None)


def test_where_a_key_was_set_is_known_afterwards(tmp_path: Path) -> None:
    config = load(tmp_path, "env:\n  kwargs:\n    lenght: 3\n", "run.seed=4")
    assert config.where("env.kwargs.lenght") == "given.yaml:3 env.kwargs.lenght"
    assert config.where("run.seed") == "command line: run.seed=4"
    assert config.where("run.keep") == "run.keep"


# -------------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("name", ["cartpole", "minatar_breakout", "repeat_previous", "atari"])
def test_a_shipped_configuration_reads_back_equal(tmp_path: Path, name: str) -> None:
    config = load_config(name, [])
    assert load(tmp_path, dump_yaml(config)) == config
    assert Config.model_validate(config.model_dump(mode="json")) == config
    assert Config.model_validate(config.model_dump(mode="json", by_alias=True)) == config
    assert name in shipped_configs()


def test_the_dump_has_every_field_of_every_section() -> None:
    root = parse(dump_yaml(Config()), "dump")
    for name, section in Config.model_fields.items():
        assert isinstance(section.annotation, type) and issubclass(section.annotation, BaseModel)
        given = set(root.entries[name].entries)
        assert given == {
            field.serialization_alias or key
            for key, field in section.annotation.model_fields.items()
        }


_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_LIKE_OTHERS = st.sampled_from(
    [
        "on",
        "no",
        "08",
        "12:30",
        "1e3",
        "null",
        "~",
        "",
        "true",
        "- a",
        "a: b",
        "#",
        "1_0",
        ".5",
        "0o7",
        "=",
        "<<",
    ]
)
_LEAF = (
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False)
    | _TEXT
    | _LIKE_OTHERS
)
_KWARGS = st.dictionaries(
    _TEXT | _LIKE_OTHERS,
    st.recursive(
        _LEAF,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
        max_leaves=6,
    ),
    max_size=3,
)


@given(
    kwargs=_KWARGS,
    rate=st.floats(min_value=1e-300, max_value=10, exclude_min=True),
    steps=st.none() | st.integers(1, 1 << 60),
    where=st.none() | (_TEXT | _LIKE_OTHERS).filter(bool),
    stats=st.lists(_TEXT | _LIKE_OTHERS, max_size=3),
    lambda_=st.floats(0, 1),
)
def test_any_configuration_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, kwargs: dict[str, Any], rate: float, steps: int | None, where: str | None,
    stats: list[str], lambda_: float,
) -> None:  # fmt: skip
    config = Config.model_validate({
        "env": {"kwargs": kwargs, "stats": stats}, "learner": {"learning_rate": rate},
        "run": {"max_steps": steps, "dir": where}, "algorithm": {"lambda": lambda_},
    })  # fmt: skip
    text = dump_yaml(config)
    again = load(tmp_path_factory.getbasetemp(), text)
    assert again == config
    assert dump_yaml(again) == text
    assert Config.model_validate(config.model_dump(mode="json", by_alias=True)) == config


@given(value=st.floats(allow_nan=False))
def test_floats_are_numbers_to_readers_of_yaml_1_2(value: float) -> None:
    from seedrl.config_yaml import to_text

    again = value_of(parse(to_text(value), "x"), float, "x")
    assert again == value and math.copysign(1, again) == math.copysign(1, value)


# --------------------------------------------------------------------------------------------------------------- help


def test_help_names_every_field_with_its_default_and_reason() -> None:
    text = help_config()
    for name, section in Config.model_fields.items():
        assert isinstance(section.annotation, type) and issubclass(section.annotation, BaseModel)
        for key, field in section.annotation.model_fields.items():
            shown = field.serialization_alias or key
            assert f"{name}.{shown} = " in text
            assert field.description and field.description in text
            assert len(field.description) > 20
