"""Run one stage: `python -m gpu NAME FOLDER DEVICE [--tiny] [--data DIR]` measures, and writes stage.json to FOLDER."""

import argparse
from pathlib import Path

from gpu.plan import STAGES
from gpu.stage import Stage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=list(STAGES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("device", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--data", type=Path)
    options = parser.parse_args()
    data = options.data.absolute() if options.data else None
    stage = Stage(options.device, options.tiny, options.folder.absolute(), data)
    stage.tell()
    STAGES[options.name].function()(stage)


if __name__ == "__main__":
    main()
