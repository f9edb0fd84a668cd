// What stands around the forward of drafted chains: tokens and slots that go in, the accepted run that comes out
// (the rule of spec/verify.py). Small numbers, but behind a forward that has read every weight each torch operation
// costs 15-30 microseconds of cold caches; together they were a tenth of a step.
#include <algorithm>

#include "octavo_native.h"

extern "C" {

void octavo_lay_chains(int64_t rows, const int64_t* indptr, const int64_t* start, const int64_t* last,
                       const int64_t* drafted, int64_t stride, int64_t* tokens, int64_t* slots) {
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t at = indptr[r], j = 0; at < indptr[r + 1]; at++, j++) {
      tokens[at] = j ? drafted[r * stride + j - 1] : last[r];
      slots[at] = start[r] + j;
    }
  }
}

void octavo_keep_chains(int64_t rows, const int64_t* indptr, const int64_t* row_ids, const int64_t* start,
                        const int64_t* drafted, int64_t stride, const int64_t* sampled, int64_t width,
                        int64_t context_tokens, int64_t* seq_lens, int64_t* last_tokens, int64_t* kept) {
  for (int64_t r = 0; r < rows; r++) {
    const int64_t* own = sampled + indptr[r];
    const int64_t columns = indptr[r + 1] - indptr[r] - 1;
    int64_t* line = kept + r * (1 + width);
    int64_t count = 0;
    while (count < columns && drafted[r * stride + count] == own[count]) count++;
    for (int64_t j = 0; j < width; j++) line[1 + j] = own[std::min(j, count)];
    count = std::min(count, std::max<int64_t>(0, context_tokens - 1 - start[r]));
    line[0] = count;
    seq_lens[row_ids[r]] = std::min(start[r] + count + 1, context_tokens);
    last_tokens[row_ids[r]] = line[1 + count];
  }
}

}  // extern "C"
