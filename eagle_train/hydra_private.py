"""Every private symbol of Hydra that this package uses, behind a function with a public name.

Such symbols may change with any release, so pyproject.toml bounds hydra-core from above. Tested with Hydra 1.3.2 and
1.3.8. tests/test_private_api.py finds private API that is used anywhere else.
"""

from argparse import ArgumentParser

from hydra._internal.utils import get_args_parser

__all__ = ["argument_parser"]


def argument_parser() -> ArgumentParser:
    """The parser by which `hydra.main` divides a command line into Hydra's own options and overrides.

    Missing: `hydra.main` reads the command line itself, so that what is wrong with it is said in Hydra's words.
    """
    return get_args_parser()
