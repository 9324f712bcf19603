"""Launchers of sweeps: on this machine, in the queue of a Slurm cluster, or on a Ray cluster."""
