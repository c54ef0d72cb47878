"""Arguments that several commands share."""

from __future__ import annotations

import argparse


def add_allow(parser: argparse.ArgumentParser) -> None:
    """Add `--allow PKG`."""
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="PKG",
        help="also import code from this package (repeatable); allow only what you trust",
    )


def add_quiet(parser: argparse.ArgumentParser) -> None:
    """Add `--quiet`."""
    parser.add_argument("--quiet", action="store_true", help="no dashboard and no progress lines")


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def natural(text: str) -> int:
    """Read a whole number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 0")
    return int(text)
