"""The program `tula`. After Ctrl-C while its modules are imported, it exits without a traceback."""

import gc
import sys


def main() -> None:
    """Run the command line and exit."""
    gc.set_threshold(50_000)  # the collections during imports find hardly anything and take a tenth of a command's time
    try:
        from tula_cli.cli.app import main as run_command_line
    except KeyboardInterrupt:
        sys.exit(130)
    run_command_line()


if __name__ == "__main__":
    main()
