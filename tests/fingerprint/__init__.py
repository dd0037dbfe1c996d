"""Ranks that run different programs stop and say where; ranks that are merely late train on."""
