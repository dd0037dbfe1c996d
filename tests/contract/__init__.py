"""What users rely on: the one line, nothing wrong in silence, old handles stay good."""
