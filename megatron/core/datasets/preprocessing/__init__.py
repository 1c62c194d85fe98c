"""From raw text (.jsonl, .jsonl.gz) to token datasets (.bin, .idx): reading, encoding in workers, writing."""
