"""The command line: commands parse arguments, call one service and show the result."""
