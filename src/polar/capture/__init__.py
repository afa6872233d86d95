"""The session core: which earlier call a conversation continues, which call a retry repeats, and whether a
reply may be trained. Plain data in, plain data out: no I/O, no tokenizer, no clock."""
