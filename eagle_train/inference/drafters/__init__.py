"""Who proposes tokens: one file each, with the interface `drafting.Drafter`. DESIGN section 2."""
