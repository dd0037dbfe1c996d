"""Numbers: what programs hold, against closed forms and against measurements."""
