"""`make bench`: every benchmark of this machine, one after the other. bench/gpu.py needs a GPU and is run by itself."""

from bench import cluster, hangs, joining, recovery, start

recovery.main()
print()
start.main()
print()
joining.main()
print()
cluster.main()
print()
hangs.main()
