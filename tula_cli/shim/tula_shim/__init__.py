"""What sitecustomize installs. The contract with the launcher stands in the docstring of the folder above."""
