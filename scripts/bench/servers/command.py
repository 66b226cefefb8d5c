"""Serve, as the command ``vllm serve MODEL`` does.

The command itself wants metadata of a distribution ``vllm``, which the CPU build does not have.
"""

from __future__ import annotations

import os


def main() -> None:
    """Serve with the arguments of the command."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    # As the command does, by a function whose module differs between releases.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    args = make_arg_parser(FlexibleArgumentParser()).parse_args()
    validate_parsed_serve_args(args)
    args.model_tag = args.model  # the Rust front end reads this one
    ServeSubcommand.cmd(args)


if __name__ == "__main__":
    main()
