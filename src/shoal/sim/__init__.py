"""The same scheduler in virtual time: arrivals, service times, closed forms that say what must come out."""
