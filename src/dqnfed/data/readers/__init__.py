"""One module per official file format; each turns a folder into `RawData` and nothing else."""
