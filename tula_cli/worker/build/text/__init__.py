"""Models of the package transformers, built from a configuration, and text to train them on."""
