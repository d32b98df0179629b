package openai

// RoomReports is what a Baton worker tells of its requests at /rooms: those that are live, and the latest that have ended.
type RoomReports struct {
	Role  string       `json:"role"`
	Rooms []RoomReport `json:"rooms"`
}

// RoomReport is one request's way through one worker. Moments are milliseconds from its arrival at the scheduler there, so clocks
// of machines do not matter; a moment that has not come is absent.
type RoomReport struct {
	Room  uint64 `json:"room,string"` // 0: the request has none
	RID   string `json:"rid"`
	Phase string `json:"phase"`
	// AgeMS is how long ago it arrived.
	AgeMS         float64  `json:"age_ms"`
	GrantedMS     *float64 `json:"granted_ms,omitempty"`
	TransferredMS *float64 `json:"transferred_ms,omitempty"`
	FirstTokenMS  *float64 `json:"first_token_ms,omitempty"`
	EndedMS       *float64 `json:"ended_ms,omitempty"`
	// Chunks are the prompt's, in order: on the prefill side when each was computed, from and to; on the decode side when it had landed, twice
	// the same. Of a long prompt the last entry covers all that follow.
	Chunks       [][2]float64 `json:"chunks,omitempty"`
	ChunksTotal  int          `json:"chunks_total"`
	PromptTokens int          `json:"prompt_tokens"`
	Tokens       int          `json:"tokens"` // generated
	Cause        string       `json:"cause,omitempty"`
	CausePhase   string       `json:"cause_phase,omitempty"`
	Detail       string       `json:"detail,omitempty"`
}
