"""The command line: parse arguments, call one service, show the result."""
