"""How ranks find each other in a store and what they send: what `trainer.distributed` is made of."""
