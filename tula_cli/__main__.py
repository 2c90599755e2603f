"""The program `tula`. After Ctrl-C while its modules are imported, it exits without a traceback."""

import sys


def main() -> None:
    """Run the command line and exit."""
    try:
        from tula_cli.cli.app import main as run_command_line
    except KeyboardInterrupt:
        sys.exit(130)
    run_command_line()


if __name__ == "__main__":
    main()
