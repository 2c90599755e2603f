"""Update the expected outcomes of the golden tests, and show the differences: `make golden` (about three minutes on two idle cores).

    python tests/golden/renew.py [--check] [CASE ...]

CASE is the beginning of names of cases, such as `recommend` or `train-method-ags`. With --check nothing is written.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import golden  # noqa: E402
import trainings  # noqa: E402
from cases import CASES  # noqa: E402
from golden import Outcome  # noqa: E402
from run_cases import Commands  # noqa: E402

MAX_SHOWN_LINES = 40  # lines of the differences of one case


def print_differences(name: str, lines: list[str]) -> None:
    """Print the differences of a case."""
    print(f"== {name}" if len(lines) > 1 else f"== {name}: {lines[0].strip()}")
    print("\n".join(lines[:MAX_SHOWN_LINES] if len(lines) > 1 else []), end="\n" if len(lines) > 1 else "", flush=True)
    if len(lines) > MAX_SHOWN_LINES:
        print(f"  and {len(lines) - MAX_SHOWN_LINES} more lines: git diff tests/golden")


def compare_with_expected(name: str, outcome: Outcome) -> list[str]:
    """Return the differences from the expected outcome."""
    expected = golden.load_outcome(name)
    return (
        ["a new case"]
        if expected is None
        else golden.list_differences(expected, outcome, golden.parse_command(name), [])
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something has changed")
    options = parser.parse_args()

    def wanted(name: str) -> bool:
        return not options.cases or name.startswith(tuple(options.cases))

    outcomes: dict[str, Outcome] = {}
    states: dict[str, dict[str, object]] = {}
    changed = 0
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        commands, weights = Commands(Path(folder)), trainings.Weights()
        try:
            for case in CASES:
                if wanted(case.name):
                    outcomes[case.name] = commands.case(case)
                    if lines := compare_with_expected(case.name, outcomes[case.name]):
                        changed += 1
                        print_differences(case.name, lines)
            for training in trainings.TRAININGS:
                if wanted(name := f"train-{training.name}"):
                    outcomes[name], state = trainings.run_training(training, commands, weights)
                    lines = compare_with_expected(name, outcomes[name])
                    if state:
                        states[training.name] = state
                        known = trainings.load_weights(training.name)
                        lines += trainings.list_weight_differences(known, state) if known else ["new weights"]
                    if lines:
                        changed += 1
                        print_differences(name, lines)
        finally:
            commands.close()
            weights.close()
    if not options.check:
        golden.save_outcomes(outcomes, all_cases=not options.cases)
        if not options.cases:
            for path in trainings.WEIGHTS.glob("*.json"):
                if path.stem not in {training.name for training in trainings.TRAININGS}:
                    path.unlink()
        for name, state in states.items():
            trainings.save_weights(name, state)
        subprocess.run(["git", "diff", "--stat", "--", str(HERE)], check=False)
    missing = [
        training.name
        for training in trainings.TRAININGS
        if wanted(f"train-{training.name}") and training.name not in states
    ]
    if missing:
        print(f"without weights, for they did not train to the end: {', '.join(missing)}")
    print(f"{len(outcomes)} cases, {changed} changed")
    return bool(missing or (options.check and changed))


if __name__ == "__main__":
    sys.exit(main())
