"""A job on a web page: a process of its own that reads the record and serves it. The agent renders nothing."""
