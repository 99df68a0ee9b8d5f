"""The benchmarks: suites, the libraries compared, the timing, the plots and tables; ``python -m cunorm bench``."""
