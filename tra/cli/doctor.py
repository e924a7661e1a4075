"""`tra doctor`."""

from dataclasses import dataclass

from tra.cli.parsing import Common, parse


@dataclass(frozen=True)
class Doctor(Common):
    """Check this machine: versions, threads, what every kernel variant computes against the reference, GPU kernels, and
    what is missing with the line that installs it. The table is meant for bug reports."""

    json: bool = False
    """Print JSON."""


def run(arguments: list[str]) -> int:
    options = parse(Doctor, arguments, "doctor")
    from tra import doctor

    return doctor.run(options.json)
