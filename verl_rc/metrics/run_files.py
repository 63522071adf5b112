"""Names of files in a run's folder that one part of the project writes and another one reads."""

ENDING = "ending.json"
"""The file on how the run ended: ``{"status": exit code, "reason": words}``."""
REPORT = "report.html"
"""The page that explains the run."""
