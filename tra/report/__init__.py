"""Tables, figures, inspections and pages: from stored results and trained models, never from training."""

from tra.report.exploring import Explorer, explore, explorer
from tra.report.figures import save_figure
from tra.report.records import Record
from tra.report.tables import Table

__all__ = ["Explorer", "Record", "Table", "explore", "explorer", "save_figure"]
