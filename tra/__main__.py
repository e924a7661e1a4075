"""Entry point of the `tra` command, which needs more than `import tra` does."""

import sys

from tra.errors import not_installed


def run() -> int:
    try:
        from tra.cli import main
    except ModuleNotFoundError as error:
        print(f"tra: error: {not_installed(error)}", file=sys.stderr)
        return 1
    return main()


if __name__ == "__main__":
    sys.exit(run())
