"""What belongs to the machine, not to training: cores, threads, files, caches, compiled loops, random numbers."""
