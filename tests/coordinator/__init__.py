"""Tests of what keeps a coordinator's record, and a real etcd for all who need one."""
