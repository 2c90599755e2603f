"""The package that sitecustomize installs. The contract with the launcher is in the docstring of the folder above."""
