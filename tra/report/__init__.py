"""Tables, figures, inspections and pages: from stored results and trained models, never from training."""

from tra.errors import not_installed

try:
    from tra.report.exploring import Explorer, explore, explorer
    from tra.report.figures import save_figure
    from tra.report.records import Record
    from tra.report.tables import Table
except ModuleNotFoundError as error:
    raise not_installed(error) from None

__all__ = ["Explorer", "Record", "Table", "explore", "explorer", "save_figure"]
