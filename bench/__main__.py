"""`make bench`: every benchmark of this machine, one after the other. Those for a GPU are run by themselves."""

from bench import cluster, hangs, joining, order, recovery, snapshots, start, workflows

recovery.main()
print()
start.main()
print()
joining.main()
print()
cluster.main()
print()
hangs.main()
print()
snapshots.main()
print()
order.main()
print()
workflows.main()
