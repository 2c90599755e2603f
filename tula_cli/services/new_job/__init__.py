"""Job files that `tula init` writes."""
