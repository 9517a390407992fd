"""The web page of a job."""
