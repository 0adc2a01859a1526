"""Shapes and dtypes checked at the door of a public function: an error names the argument, what it is and what it should be."""

from __future__ import annotations

from torch import Tensor

from seedrl.errors import ShapeError


def check_shapes(**arguments: tuple[Tensor, str]) -> dict[str, int]:
    """Checks that letters mean the same size in all arguments.

    Args: each a tensor and its dimensions, "T B"; a number is a size of its own, "..." at the end takes any further ones.
    Returns: the size of each letter.
    Raises: ShapeError, naming the argument, its shape and the expected one.
    """
    sizes: dict[str, int] = {}
    for name, (tensor, dims) in arguments.items():
        letters, shape = dims.split(), tensor.shape
        if letters and letters[-1] == "...":
            letters, shape = letters[:-1], shape[: len(letters) - 1]
        fits = len(shape) == len(letters) and all(
            size == (int(letter) if letter.isdigit() else sizes.setdefault(letter, size))
            for letter, size in zip(letters, shape, strict=True)
        )
        if not fits:
            known = ", ".join(f"{letter} = {size}" for letter, size in sizes.items())
            raise ShapeError(
                what=f"{name} has the shape {list(tensor.shape)}; it must be [{dims.replace(' ', ', ')}]",
                where=f"with {known}" if known else "",
                do=f"pass {name} time first, one column per environment",
            )
    return sizes
