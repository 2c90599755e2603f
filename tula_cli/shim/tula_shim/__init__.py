"""The package that sitecustomize installs. The docstring of the folder above is the contract with the launcher."""
