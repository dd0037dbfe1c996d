"""`ds_config.json` read, understood and put to work. Modules: schedules."""
