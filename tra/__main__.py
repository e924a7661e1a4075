"""Entry point of the `tra` command, which needs more than `import tra` does."""

import sys


def run() -> int:
    try:
        from tra.cli import main
    except ModuleNotFoundError as error:
        print(f"tra: error: {error}: pip install 'threshold-relative-attention[train]'", file=sys.stderr)
        return 1
    return main()


if __name__ == "__main__":
    sys.exit(run())
