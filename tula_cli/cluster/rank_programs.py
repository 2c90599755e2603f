"""The program of each task: tula's worker, or the user's script as a probe, training, resume test or rate search."""

from tula_cli.cluster.rank_program import RankProgram, WorkerProgram
from tula_cli.cluster.scripts.rate_search import ScriptRateSearch
from tula_cli.cluster.scripts.resume_test import ResumeTest
from tula_cli.cluster.scripts.training import ScriptTraining
from tula_cli.run.directory import RunDir
from tula_cli.run.records.tasks import ProbeTask, RateSearchTask, ResumeTestTask, Task, TrainTask


def make_rank_program(run: RunDir, task: Task) -> RankProgram:
    if task.script is None:
        return WorkerProgram(run, task)
    match task:
        case ProbeTask():
            from tula_cli.cluster.scripts.probe import ScriptProbe  # here: needs numpy

            return ScriptProbe(run, task)
        case TrainTask():
            return ScriptTraining(run, task)
        case ResumeTestTask():
            return ResumeTest(run, task)
        case RateSearchTask():
            return ScriptRateSearch(run, task)
        case _:
            raise AssertionError(f"a script has no task {task.id}")
