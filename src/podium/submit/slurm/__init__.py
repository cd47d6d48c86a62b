"""Jobs of Slurm: their batch script, what it asks Podium while it runs, and how they are watched."""
