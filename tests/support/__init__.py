"""What tests share: a scripted engine with a real tokenizer and template, and the oracle of what it meant."""
