package hub

import (
	"errors"
	"fmt"
	"sort"

	"github.com/baton-pd/baton/internal/kv"
)

// badPrefixes says why prefixes do not name the first pages of a prompt with these chunks, one page of each rank to each.
func badPrefixes(s kv.Shards, bounds []int, prefixes []kv.Prefix) error {
	if len(prefixes) > 0 && s == (kv.Shards{}) {
		return errors.New("the beginning of a prompt can be cached only where chunks are pages of ranks")
	}
	start := 0
	for _, x := range prefixes {
		from, to := tokensOf(bounds, chunkAt(bounds, start))
		whole := x.Tokens == start+s.PageTokens || x.Tokens == to && to-start < s.PageTokens
		if start >= to || (start-from)%s.PageTokens != 0 || x.Tokens > to || !whole {
			return fmt.Errorf("tokens [%d,%d) are no page of chunks %v", start, x.Tokens, bounds)
		}
		start = x.Tokens
	}
	return nil
}

// chunkAt is the chunk of token t; len(bounds)-1 if it is in none.
func chunkAt(bounds []int, t int) int { return sort.SearchInts(bounds, t+1) - 1 }

// cachedTokens is how many tokens of a prompt the first n of its prefixes have.
func cachedTokens(prefixes []kv.Prefix, n int) int {
	if n == 0 {
		return 0
	}
	return prefixes[n-1].Tokens
}

// wholeChunk lists all pages of the chunk with tokens [from, to), rank after rank: of each those that were cached, which are
// some of shared, then those that come.
func wholeChunk(s kv.Shards, from, to int, prefixes []kv.Prefix, shared [][]kv.PageID, come []kv.PageID) []kv.PageID {
	if len(shared) == 0 {
		return come
	}
	var out []kv.PageID
	per := len(come) / s.Ranks()
	for r := range s.Ranks() {
		for k, pages := range shared {
			if end := prefixes[k].Tokens; from < end && end <= to {
				out = append(out, pages[r])
			}
		}
		out = append(out, come[r*per:(r+1)*per]...)
	}
	return out
}

// fresh lists, for each prefix that was not cached, the pages that came for it. perChunk are those of each chunk, have the tokens
// that were cached.
func fresh(s kv.Shards, bounds []int, prefixes []kv.Prefix, have int, perChunk [][]kv.PageID) (out [][]kv.PageID) {
	for _, x := range prefixes {
		if x.Tokens <= have {
			continue
		}
		last := x.Tokens - 1
		i := chunkAt(bounds, last)
		from, per := max(bounds[i], have), len(perChunk[i])/s.Ranks()
		var pages []kv.PageID
		for r := range s.Ranks() {
			pages = append(pages, perChunk[i][r*per+(last-from)/s.PageTokens])
		}
		out = append(out, pages)
	}
	return out
}
