"""Tables, figures and inspections: from stored results and trained models, never from training."""

from tra.report.figures import save_figure
from tra.report.records import Record
from tra.report.tables import Table

__all__ = ["Record", "Table", "save_figure"]
