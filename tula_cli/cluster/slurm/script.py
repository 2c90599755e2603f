"""submitit's executor as the writer of job scripts; how they are submitted is tula's own."""

import submitit


class ScriptWriter(submitit.SlurmExecutor):
    """A thin executor that writes submitit's script and calls no sbatch.

    submitit's own submission has no time limit, passes an allocation's variables on, prints what sbatch says and cannot
    take over a job that was accepted unheard. The two hooks used here are the ones that submitit's own executors override.
    """

    def text(self, command: str | None = None) -> str:
        """Return the script that sbatch is given, with the parameters set so far.

        Args:
            command: what srun starts; submitit, which calls what was left for it, where nothing is said.
        """
        return str(self._make_submission_file_text(command or self._submitit_command_str, ""))
