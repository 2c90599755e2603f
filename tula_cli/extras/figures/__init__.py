"""The figures of the paper that show gradients (Figures 5 to 8), for reports, and the Hessian's eigenvalue behind them."""

from tula_cli.extras.figures import gradients

package = gradients
"""This package as reports use it: `PaperFigures`."""
