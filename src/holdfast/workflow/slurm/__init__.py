"""Tasks on a Slurm cluster.

    runner          on the machine where it was submitted: decides, submits, cancels
      job           of sbatch, for all tasks that begin together, a node each: prepares them, runs them, and requeues
                    itself when its time is over
        task        one process for each, started by srun: its life, from its inputs to its last upload

All of them see the workflow's folder. What has happened is written there first, and then told by a datagram, so that
nobody has to look every moment; a datagram that gets lost costs some seconds.
"""
