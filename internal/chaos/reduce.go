package chaos

// Reduce finds a part of faults, in their order, for which fails still says true, such that leaving out
// any single one makes it say false (as far as fails is steady: a run that fails by chance only is
// tried as often as fails itself tries it). It halves first, so a few of many are found in few
// calls (delta debugging: Zeller and Hildebrandt, 2002). fails is not asked about the whole, which the
// caller knows to fail, but about the empty schedule first.
func Reduce(faults []Fault, fails func([]Fault) bool) []Fault {
	if len(faults) == 0 || fails(nil) {
		return nil
	}
	parts := 2
	for len(faults) > 1 {
		size := (len(faults) + parts - 1) / parts
		smaller := false
		for from := 0; from < len(faults); from += size {
			part := faults[from:min(from+size, len(faults))]
			rest := append(append([]Fault(nil), faults[:from]...), faults[min(from+size, len(faults)):]...)
			if parts == 2 || len(part) < len(rest) {
				if fails(part) {
					faults, parts, smaller = append([]Fault(nil), part...), 2, true
					break
				}
			}
			if parts > 2 && fails(rest) {
				faults, parts, smaller = rest, max(parts-1, 2), true
				break
			}
		}
		if !smaller {
			if parts >= len(faults) {
				break
			}
			parts = min(2*parts, len(faults))
		}
	}
	return faults
}
