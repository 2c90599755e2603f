"""The report of a run as one document: `tula report`, and the files of exports."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tula_cli.run.directory import Run
    from tula_cli.run.records.recommendations import Recommendation, TradeOff
    from tula_cli.services.document import Document, TextForm


class Report:
    """This package as the core uses it: a `ReportPackage`."""

    @property
    def command(self) -> Callable[..., None]:
        from tula_cli.extras.report.command import report

        return report

    def build(self, runs: "Sequence[Run]", *, now: float) -> "Document":
        from tula_cli.extras.report.material import collect_report_data
        from tula_cli.extras.report.run_report import build_document

        return build_document(collect_report_data(runs, now=now))

    def render_text(self, document: "Document", form: "TextForm") -> str:
        from tula_cli.extras.report.formats import RENDERERS

        return RENDERERS[form](document)

    def render_page(self, document: "Document") -> str:
        from tula_cli.extras.report.page import render_page

        return render_page(document)

    def plot(self, recommendation: "Recommendation", against: "TradeOff") -> Any:
        from tula_cli.extras.report.sections import build_tradeoff_figure
        from tula_cli.extras.report.svg import draw_figure

        return draw_figure(
            build_tradeoff_figure(recommendation.rows, recommendation.choice, recommendation.currency, against=against)
        )


package = Report()
