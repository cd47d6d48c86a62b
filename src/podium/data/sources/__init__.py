"""Sources for arrays in memory, HDF5 files and generated samples."""
