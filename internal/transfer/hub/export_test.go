package hub

// Attached is the number of rooms that the hub's sessions know of.
func Attached(h *Receivers) (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, rs := range h.sessions {
		n += len(rs.rooms)
	}
	return n
}
