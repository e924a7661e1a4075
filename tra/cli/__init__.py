"""The command line: one file per command, with its options, its checks and what it calls."""

import importlib
import os
import sys
import warnings

from tra.errors import RunError, not_installed
from tra.lookup import lookup
from tra.version import __version__

COMMANDS = {
    "demo": "Train TRA and RoPE on flip-flop and compare them past the training length (two or three minutes).",
    "train": "Train a recipe: tra train RECIPE [options]. Resume a run: tra train --resume RUN.",
    "evaluate": "Measure a trained run on its recipe's sets, or on others.",
    "reproduce": "Make a table or figure of the paper, or run your own experiment: tra reproduce NAME|FILE.",
    "inspect": "Show what a trained run attends to: heatmaps, a summary of every head, an interactive page.",
    "adopt": "Put TRA into a pretrained model of Hugging Face: tra adopt MODEL FOLDER.",
    "export": "Write a run as a Hugging Face folder: tra export RUN FOLDER.",
    "generate": "Continue a prompt with a run on text or an exported folder.",
    "bench": "Measure the operator and whole training steps against PyTorch's attention, as ratios.",
    "doctor": "Check this machine: kernels, GPUs, threads, versions, and what is missing.",
    "list": "List recipes, mechanisms with their options, tasks, experiments, model sizes and trained models.",
}
"""Each is a module of its name beside this one, with a function `run(arguments)` that returns the exit code."""


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code: 2 for a wrong argument, 1 for a failure, 130 after Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else arguments
    warnings.showwarning = lambda message, *_, **__: print(f"tra: warning: {message}", file=sys.stderr)
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: tra COMMAND [options]   (tra COMMAND --help says more)\n")
        print("\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items()))
        return 0
    if arguments[0] == "--version":
        print(f"tra {__version__}")
        return 0
    try:
        _check_encoding(arguments)
        lookup(COMMANDS, arguments[0], "command")
        # Each imports what it needs itself: a misspelt command should not wait for the training stack.
        return importlib.import_module(f"tra.cli.{arguments[0]}").run(arguments[1:])
    except ValueError as error:
        return _failed(error, 2)
    except (OSError, RunError) as error:
        return _failed(error, 1)
    except ModuleNotFoundError as error:
        return _failed(not_installed(error), 1)
    except (MemoryError, RuntimeError) as error:
        if not _is_lack_of_memory(error):
            raise
        return _failed(f"out of memory: {error}", 1)
    except KeyboardInterrupt as stop:
        print(f"tra: {str(stop) or 'stopped'}", file=sys.stderr)
        return 130


def _failed(reason: object, code: int) -> int:
    """Say in one line why a command failed."""
    print(f"tra: error: {' '.join(str(reason).split())}", file=sys.stderr)
    return code


def _check_encoding(arguments: list[str]) -> None:
    """Refuse at once what no file could be written with later."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise ValueError(f"arguments must be valid UTF-8, got {argument!r}") from None


def _is_lack_of_memory(error: Exception) -> bool:
    """PyTorch has a class for it on accelerators, but not on the CPU."""
    said = ("allocate memory", "out of memory", "size calculation overflowed")
    return isinstance(error, MemoryError) or any(words in str(error) for words in said)


def is_first_process() -> bool:
    """Of those that torchrun or accelerate launch started."""
    return os.environ.get("RANK", "0") == "0"
