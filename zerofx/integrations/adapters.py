"""Which values of a PEFT model its adapters are."""
